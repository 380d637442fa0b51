//! Loads and stores of the lanes: global, shared and private memory.

use crate::execute::Environment;
use crate::instruction::*;
use crate::wave::Wave;

/// The active lanes, in the order of the launch: hardware promises none.
fn lanes(exec: u64, order: &[usize]) -> impl Iterator<Item = usize> {
    order.iter().copied().filter(move |lane| exec >> lane & 1 == 1)
}

impl Wave {
    /// The address in every lane; inactive lanes hold nothing of use.
    fn addresses(&self, address: Address, offset: i64) -> Result<[u64; LANES], String> {
        Ok(match address {
            Address::Vector(register) => {
                let ((low, high), [low_defined, high_defined]) = self.wide(WideSource::Vector(register));
                self.must_be_defined(low_defined & high_defined, "the address")?;
                std::array::from_fn(|lane| ((high[lane] as u64) << 32 | low[lane] as u64).wrapping_add_signed(offset))
            }
            Address::ScalarPlus(base, register) => {
                let base = self.get_wide(base)?;
                let (lanes, defined) = self.vector(register);
                self.must_be_defined(defined, "the address")?;
                std::array::from_fn(|lane| base.wrapping_add(lanes[lane] as u64).wrapping_add_signed(offset))
            }
        })
    }

    pub(crate) fn access(&mut self, instruction: &Instruction, environment: &mut Environment) -> Result<(), String> {
        match *instruction {
            Instruction::GlobalLoad { width, data, address, offset } => {
                let addresses = self.addresses(address, offset)?;
                self.global_load(width, data, &addresses, environment)
            }
            Instruction::GlobalStore { width, data, address, offset } => {
                let addresses = self.addresses(address, offset)?;
                self.global_store(width, data, &addresses, environment)
            }
            Instruction::SharedLoad { dwords, data, address, offsets, two } => {
                self.shared_load(dwords, data, address, &offsets[..=two as usize], environment)
            }
            Instruction::SharedStore { dwords, data, address, offsets, two } => {
                let parts = [(data[0], offsets[0]), (data[1], offsets[1])];
                self.shared_store(dwords, address, &parts[..=two as usize], environment)
            }
            Instruction::PrivateLoad { dwords, data, address, offset } => {
                for lane in lanes(self.exec(), environment.lane_order) {
                    let first = self.private_address(address, lane, offset)?;
                    for dword in 0..dwords {
                        let (value, defined) = self.private.load(lane, first + 4 * u32::from(dword))?;
                        self.put_lane(data + u16::from(dword), lane, value, defined);
                    }
                }
                Ok(())
            }
            Instruction::PrivateStore { dwords, data, address, offset } => {
                for lane in lanes(self.exec(), environment.lane_order) {
                    let first = self.private_address(address, lane, offset)?;
                    for dword in 0..dwords {
                        let (lanes, defined) = self.vector(data + u16::from(dword));
                        let value = (lanes[lane], defined >> lane & 1 == 1);
                        self.private.store(lane, first + 4 * u32::from(dword), value)?;
                    }
                }
                Ok(())
            }
            _ => Err("not an access to memory".to_string()),
        }
    }

    fn private_address(&self, address: Option<u16>, lane: usize, offset: u32) -> Result<u32, String> {
        let Some(register) = address else { return Ok(offset) };
        let (lanes, defined) = self.vector(register);
        self.must_be_defined(defined, "the address")?;
        Ok(lanes[lane].wrapping_add(offset))
    }

    fn global_load(
        &mut self,
        width: Width,
        data: u16,
        addresses: &[u64; LANES],
        environment: &mut Environment,
    ) -> Result<(), String> {
        let exec = self.exec();
        for lane in lanes(exec, environment.lane_order) {
            if let Width::Dwords(count) = width {
                let mut loaded = [(0, false); 4];
                let loaded = &mut loaded[..count as usize];
                environment.memory.load(addresses[lane], loaded, environment.accessor)?;
                for (register, (value, defined)) in (data..).zip(loaded) {
                    self.put_lane(register, lane, *value, *defined);
                }
            } else {
                let (value, defined) = environment.memory.load_part(addresses[lane], width, environment.accessor)?;
                self.put_lane(data, lane, value, defined);
            }
        }
        Ok(())
    }

    fn global_store(
        &mut self,
        width: Width,
        data: u16,
        addresses: &[u64; LANES],
        environment: &mut Environment,
    ) -> Result<(), String> {
        let count = if let Width::Dwords(count) = width { count } else { 1 };
        for register in data..data + u16::from(count) {
            self.must_be_defined(self.vector(register).1, "what is stored")?;
        }
        for lane in lanes(self.exec(), environment.lane_order) {
            let mut values = [0; 4];
            for (register, value) in (data..data + u16::from(count)).zip(&mut values) {
                *value = self.vector(register).0[lane];
            }
            if width == Width::U16 {
                environment.memory.store_short(addresses[lane], values[0], environment.accessor)?;
            } else {
                environment.memory.store(addresses[lane], &values[..count as usize], environment.accessor)?;
            }
        }
        Ok(())
    }

    fn shared_load(
        &mut self,
        dwords: u8,
        data: u16,
        address: u16,
        offsets: &[u32],
        environment: &mut Environment,
    ) -> Result<(), String> {
        let (addresses, defined) = self.vector(address);
        self.must_be_defined(defined, "the address")?;
        let addresses = *addresses;
        for lane in lanes(self.exec(), environment.lane_order) {
            let mut register = data;
            for offset in offsets {
                let mut loaded = [(0, false); 4];
                let loaded = &mut loaded[..dwords as usize];
                let address = addresses[lane].wrapping_add(*offset);
                environment.shared.load(address, loaded, environment.accessor)?;
                for (value, defined) in loaded {
                    if !*defined {
                        return Err(format!("shared memory from byte {address} on is read before it is written"));
                    }
                    self.put_lane(register, lane, *value, *defined);
                    register += 1;
                }
            }
        }
        Ok(())
    }

    fn shared_store(
        &mut self,
        dwords: u8,
        address: u16,
        parts: &[(u16, u32)],
        environment: &mut Environment,
    ) -> Result<(), String> {
        let (addresses, defined) = self.vector(address);
        self.must_be_defined(defined, "the address")?;
        for lane in lanes(self.exec(), environment.lane_order) {
            for (data, offset) in parts {
                let mut values = [(0, false); 4];
                for (register, value) in (*data..data + u16::from(dwords)).zip(&mut values) {
                    let (lanes, defined) = self.vector(register);
                    *value = (lanes[lane], defined >> lane & 1 == 1);
                }
                let values = &values[..dwords as usize];
                environment.shared.store(addresses[lane].wrapping_add(*offset), values, environment.accessor)?;
            }
        }
        Ok(())
    }
}
